"""From a folder of videos to items: scan → plan → content_hash → segment, extract → encode_segments → commit.

`index_run` leads a run through these files in this order; `index_report` is what it tells.
"""
