"""Analysis of a trained model. Data goes study → probes → analysis_run → html_report."""
