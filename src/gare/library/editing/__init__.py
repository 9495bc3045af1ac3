"""Hits for other programs: the moments they mean, as clips, playlists, cut lists, tables and chapters."""
