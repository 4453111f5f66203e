"""placeholder"""


def applies(q, v):
    return False


def ready(q, k, v, rule):
    return False
