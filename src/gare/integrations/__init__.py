"""GARE inside other people's tools: MTEB, sentence-transformers. A file needs its library when used."""
