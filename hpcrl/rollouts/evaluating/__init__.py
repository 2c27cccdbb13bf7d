"""An evaluation by itself: engines, and no trainer."""
