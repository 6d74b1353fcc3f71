import time


def call(action, attempts, delay_s, sleep=time.sleep):
    for _ in range(attempts + 1):
        try:
            return action()
        except OSError:
            sleep(delay_s)
    return None
