"""Pictures of blocks, plans and time. Drawn from what `on_step` gives (plan, result, snapshot), and from nothing else.

    from rich import print
    from minipaged import LLM
    from minipaged.show import Recorder

    recorder = Recorder()
    LLM(block_size=4, on_step=recorder).generate("Four score and seven years ago our")
    print(recorder.draw())

What is returned are rich renderables, for 80 columns; letters and symbols say all that colours say.
"""

from minipaged.show.contents import Contents, contents_at
from minipaged.show.frame import Frame, make_snapshot
from minipaged.show.labels import label
from minipaged.show.output_path import output_path
from minipaged.show.pool_picture import draw_pool
from minipaged.show.pool_strip import draw_strip
from minipaged.show.queue_picture import draw_queues
from minipaged.show.recorder import Recorder, each
from minipaged.show.step_picture import draw_frame, draw_plan, draw_step
from minipaged.show.table_picture import draw_tables
from minipaged.show.trace import Trace
from minipaged.show.words import explain

__all__ = [
    "Contents",
    "Frame",
    "Recorder",
    "Trace",
    "contents_at",
    "draw_frame",
    "draw_plan",
    "draw_pool",
    "draw_queues",
    "draw_step",
    "draw_strip",
    "draw_tables",
    "each",
    "explain",
    "label",
    "make_snapshot",
    "output_path",
]
