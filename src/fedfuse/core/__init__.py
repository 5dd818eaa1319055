"""Values and seams: what a model, an update, a cohort and a recipe are. Of ours, it imports tasks and errors only."""
