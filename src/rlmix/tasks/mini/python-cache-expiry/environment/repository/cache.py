class Cache:
    def __init__(self, ttl_s, clock):
        self._ttl_s, self._clock = ttl_s, clock
        self._entries = {}

    def put(self, key, value):
        ends = self._entries.get(key, (None, self._clock() + self._ttl_s))[1]
        self._entries[key] = (value, ends)

    def get(self, key, default=None):
        value, ends = self._entries.get(key, (default, 0))
        return value if self._clock() <= ends else default

    def __len__(self):
        return len(self._entries)
