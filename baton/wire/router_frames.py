"""Frames of a router to one worker, several of which travel as one."""

from collections.abc import Sequence

from batonpb.decode_pb2 import RouterFrame


def gather(frames: Sequence[RouterFrame]) -> RouterFrame:
    """Return one frame that carries ``frames`` (at least one, none of them gathered) in order."""
    return frames[0] if len(frames) == 1 else RouterFrame(frames=frames)


def scatter(frame: RouterFrame) -> Sequence[RouterFrame]:
    """Return the frames that a frame carries, or the frame itself if it is single."""
    return frame.frames or (frame,)
