from tests.engine_counts import *
def go(): return window("hsdp_each")
