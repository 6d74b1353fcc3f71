"""Sends each session's requests to one replica, chosen by what each replica can serve."""
