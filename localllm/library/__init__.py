"""The models on this machine, by name: found, listed, and fetched from the hub.

`localllm.library.find` turns what a user types into a file, `listing` lists what is there, `details` reads what is
known of a file, and `pull` downloads.  `names` has what a name on the hub means, `hub_cache` where its files lie.
"""
