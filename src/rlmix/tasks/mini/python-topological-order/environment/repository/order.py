def sort(needs):
    done = []

    def visit(name):
        if name in done:
            return
        for other in needs[name]:
            visit(other)
        done.append(name)

    for name in needs:
        visit(name)
    return done
