"""The library on many machines, by Ray. Nothing here is needed on one machine."""
