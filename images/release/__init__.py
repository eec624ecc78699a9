"""Publishes a release: images, their lists of parts, and the chart that names the images by their digests."""
