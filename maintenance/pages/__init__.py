"""What writes pages and pictures of docs/, and the site's own code: the FAQ, the drawings, the hooks of mkdocs."""
