"""What every test may rely on, however the suite was started."""

import signal

# A shell that starts the suite in the background makes it ignore SIGINT, and every child would
# inherit that; tests that interrupt a child need the usual disposition.
signal.signal(signal.SIGINT, signal.default_int_handler)
