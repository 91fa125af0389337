"""The models on this machine and on the hub: find, list and download them by name.

`localllm.catalog.find` returns the file that a user's name means, `listing` lists models, `file_details` reads
headers, and `pull` downloads. `hub_names` parses names of models on the hub, and `hub_cache` locates their files.
"""
