"""Pictures of stored numbers, one module for each part of the report. Nothing here looks at a model."""
