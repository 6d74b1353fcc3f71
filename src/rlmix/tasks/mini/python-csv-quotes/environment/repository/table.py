def write_row(fields):
    return ','.join(fields)


def read_row(line):
    return line.split(',')
