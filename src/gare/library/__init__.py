"""A library of videos on disk: index folders, search them in words, find the moment that matched."""
