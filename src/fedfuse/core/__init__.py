"""Values: what a model, an update, a cohort and a recipe are. Imports torch and nothing of ours."""
