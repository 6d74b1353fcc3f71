"""Which addresses only this machine can reach. Pure: no name is looked up."""

import ipaddress

LOCAL_NAMES = ("localhost",)


def is_loopback(host: str) -> bool:
    """True when only processes of this machine can connect; False for every other name."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host in LOCAL_NAMES
