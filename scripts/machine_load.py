"""Which share of the machine's time other programs have, from /proc/stat.

    others = Others()
    subprocess.run(...)
    print(f"{others.share():.0%}")

What this process and its children use is not counted; a child counts as ours when it has ended and was waited for.
"""
import os
import resource
import time

BUSY = 0.1  # from this share on a figure is of a busy machine


def busy_seconds():
    """Of all CPUs, by everybody, what the hypervisor gave to others included."""
    with open("/proc/stat") as file:
        user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, file.readline().split()[1:9])
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def own_seconds():
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


class Others:
    """The programs of others, from the constructor on."""

    def __init__(self):
        self._begin, self._busy, self._own = time.monotonic(), busy_seconds(), own_seconds()

    def share(self):
        """From 0 to 1, of all CPUs."""
        busy, own = busy_seconds() - self._busy, own_seconds() - self._own
        seconds = max(1e-3, time.monotonic() - self._begin)
        return min(1.0, max(0.0, busy - own) / (seconds * os.cpu_count()))
