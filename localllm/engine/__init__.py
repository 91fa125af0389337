"""Runs requests: `request` says what is asked for, `scheduler` what the next step evaluates, `cache` what is known
already, `engine` has the thread in which all of it happens.  Nothing here knows of text."""
