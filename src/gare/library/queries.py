"""Plain sentences a person might type. One half makes stage-1 vectors, the other checks them.

They need not match a library: an increment differs little from text to text, so their average stands for all.
"""

from __future__ import annotations

_SENTENCES = """
a dog catches a ball in the park
a woman is cooking vegetables in a kitchen
children playing on a beach
a man plays the guitar and sings
a car drives along a road at night
people dancing at a party
a cat sleeping on a sofa
a football match in a stadium
a cartoon character talks to another one
someone shows how to use a computer program
a person rides a bicycle down a hill
a bird sits on the branch of a tree
two men are talking in a television studio
a girl blows out the candles of a birthday cake
waves breaking on the rocks
a train arrives at the station
a man explains a mathematical problem on a board
a baby laughs
a band performs on a stage in front of a crowd
snow falling in the mountains
a woman puts on make-up
a runner crosses the finish line
a boat on a lake at sunset
hands folding a piece of paper
a video game with soldiers shooting
a horse gallops across a field
a chef puts a dish on the table
a crowd walks across a busy street
an aeroplane takes off
a teacher speaks to a class
fish swimming under water
a swimmer jumps into the pool
the skyline of a city
a man repairs the engine of a car
a wedding couple kisses
fireworks over a river
someone paints a picture
a skateboarder falls off his board
an interview with a politician
flowers in a garden
a child reads a book in bed
a monkey eats a banana
rain on a window
a wrestler throws his opponent
people sitting around a camp fire
a close-up of a face
a motorcycle race
a grandmother knits a scarf
""".strip().splitlines()

STAGE1_SENTENCES: tuple[str, ...] = tuple(_SENTENCES[::2])
AUDIT_SENTENCES: tuple[str, ...] = tuple(_SENTENCES[1::2])
