"""HTTP server for trained models, with a web page."""
