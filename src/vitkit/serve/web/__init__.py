"""The page's files, as they are sent: no build step, no other host."""
