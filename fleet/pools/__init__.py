"""Worker pools under Ray, and the controller that keeps them at their sizes."""
