"""A progress that keeps what it is told."""

from whereformer.lab.progress import Progress


class Told(Progress):
    def __init__(self):
        self.lines, self.parts, self.characters = [], [], 0

    def line(self, text):
        self.lines.append(text)

    def begin(self, label):
        self.parts.append(label)

    def step(self, steps=1, detail=""):
        self.characters += steps
