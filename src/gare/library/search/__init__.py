"""From a request to hits. A search passes the files in this order: `search_request`, `query_language`,
`query_vectors`, `stage1`, `exact_score`, `ranked_items`, `search_hit`.

`searcher` calls them one after the other; `stage1_audit` measures how much stage 1 misses.
"""
