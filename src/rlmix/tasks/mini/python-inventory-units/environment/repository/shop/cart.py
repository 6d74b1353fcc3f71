class Cart:
    def __init__(self, discount_percent=0):
        self.lines = []
        self.discount_percent = discount_percent

    def add(self, cents, quantity=1):
        self.lines.append((cents, quantity))

    def total(self):
        whole = sum(cents for cents, _ in self.lines)
        return whole - whole * self.discount_percent / 100
