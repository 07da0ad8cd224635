"""A table whose moods come from the prompt: slow, or ill enough to send half a message. Lives in a draft's process."""

import gc
import socket
import time

from table import TableLM

from smcdecode.engine.remote.channel import Channel

SLOW, CUT = 4, 5  # prompt tokens


class MoodyLM(TableLM):
    """Passes over a SLOW token, and all later ones, take a hundred times as long; one over CUT sends half a message."""

    def __init__(self, table, eos, quick):
        super().__init__(table, eos, "moody")
        self.quick, self.seconds = quick, quick

    def __call__(self, tokens, positions, view, rows):
        if bool((tokens == SLOW).any()):
            self.seconds = 100 * self.quick
        if bool((tokens == CUT).any()):
            channel = next(thing for thing in gc.get_objects() if type(thing) is Channel)
            channel._end.send(bytes(3))
            channel._end.shutdown(socket.SHUT_WR)
            time.sleep(600)
        time.sleep(self.seconds)
        return super().__call__(tokens, positions, view, rows)
