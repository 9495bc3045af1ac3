"""From a folder of videos to items: scan → plan → content_hash → segment, extract → encode_segments → commit.

`index_run` leads a run through these files in this order; `file_outcomes` decides what becomes of each file;
`index_report` is what a run tells.
"""
