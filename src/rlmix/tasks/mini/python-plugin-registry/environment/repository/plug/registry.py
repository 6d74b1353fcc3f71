_KNOWN = {}


def register(name, plugin):
    _KNOWN[name] = plugin


def get(name):
    return _KNOWN[name]


def names():
    return sorted(_KNOWN)
