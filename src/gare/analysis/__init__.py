"""What a model does, in numbers, pictures and one report: `gare analyze`."""
