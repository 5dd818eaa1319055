"""Published methods, one per file: each is a recipe of ten to forty lines with its paper."""
