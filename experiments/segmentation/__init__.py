"""Where the digits are: a U-Net on canvases of real pictures, with maps of its uncertainty."""
