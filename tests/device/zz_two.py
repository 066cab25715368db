from tests.support.ranks import Ranks
from tests.device.zz_one import case
import sys
if __name__ == "__main__":
    r = Ranks(int(sys.argv[1]))
    for x in r.run(case, ["overlap","compress","fit"], int(sys.argv[1]), limit=100): print(*x, sep="\n"); print("--")
    r.stop()
