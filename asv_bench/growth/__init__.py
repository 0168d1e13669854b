"""How cost grows with size: curves over file sizes, elements, leaves, workers and progress."""
