"""Where each link goes wrong, and what it costs."""
