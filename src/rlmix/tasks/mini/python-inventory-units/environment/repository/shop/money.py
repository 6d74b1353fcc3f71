def shown(cents):
    return f'{cents // 100}.{cents % 100}'
