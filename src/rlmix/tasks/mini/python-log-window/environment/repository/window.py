class Rate:
    def __init__(self, length_s):
        self.length_s, self.times = length_s, []

    def add(self, time_s):
        self.times.append(time_s)
        self.times = [t for t in self.times if t > time_s - self.length_s]

    def rate(self, now_s):
        return len(self.times) / self.length_s
