#!/usr/bin/env python3
"""Writes the text that `make demo` trains on: make_stories.py > stories.txt

Little stories in plain English, put together from a grammar, so that a model of a
million parameters that reads them for a minute writes English too. The same text on
every machine and Python: of `random`, only random() promises that.
"""

import random
import sys

NUM_BYTES = 320_000
SEED = 7

# Name, subject, possessive.
PEOPLE = [
    ("Anna", "she", "her"), ("Ben", "he", "his"), ("Clara", "she", "her"), ("David", "he", "his"),
    ("Emma", "she", "her"), ("Frank", "he", "his"), ("Grace", "she", "her"), ("Henry", "he", "his"),
]
ANIMALS = ["dog", "cat", "horse", "bird", "goat", "duck"]
COLOURS = ["red", "blue", "green", "white", "black", "yellow"]
SIZES = ["small", "big", "new", "little", "pretty"]
THINGS = ["boat", "kite", "hat", "lamp", "book", "ball", "basket", "clock"]
FOODS = ["bread", "soup", "cheese", "honey", "apples", "pears"]
PLACES = ["river", "garden", "market", "forest", "mill", "bridge", "harbour", "school"]
WEATHER = ["The sun was warm", "It rained all day", "The wind was cold", "Snow fell on the roofs", "The sky was clear"]
TIMES = ["In the morning", "In the evening", "After lunch", "On Monday", "One day", "Late at night"]
NUMBERS = ["two", "three", "four", "five", "seven"]


class Storyteller:
    def __init__(self, seed):
        self.random = random.Random(seed)

    def one_of(self, choices):
        return choices[int(self.random.random() * len(choices))]

    def opening(self, name):
        return self.one_of([
            lambda: f"{self.one_of(TIMES)} {name} went to the {self.one_of(PLACES)}.",
            lambda: f"{self.one_of(WEATHER)}, and {name} walked to the {self.one_of(PLACES)}.",
            lambda: f"{name} lived in a {self.one_of(SIZES)} house near the {self.one_of(PLACES)}.",
        ])()

    def finding(self, they, their):
        thing = f"{self.one_of(SIZES)} {self.one_of(COLOURS)} {self.one_of(THINGS)}"
        return self.one_of([
            lambda: f"There {they} found a {thing} under a tree. {they.capitalize()} took it home.",
            lambda: f"There {they} saw a {thing} and wanted to buy it.",
            lambda: f"{they.capitalize()} had lost {their} {thing} and looked for it everywhere.",
        ])()

    def meeting(self, they, their, friend):
        animal = self.one_of(ANIMALS)
        return self.one_of([
            lambda: f"On the way {they} met {friend}, who had a {self.one_of(COLOURS)} {animal}.",
            lambda: f"A {self.one_of(SIZES)} {animal} came and sat beside {their} chair.",
            lambda: f"{friend} brought {self.one_of(NUMBERS)} {animal}s from the {self.one_of(PLACES)}.",
        ])()

    def talking(self, name, friend):
        return self.one_of([
            lambda: f'"Where is the {self.one_of(ANIMALS)}?" asked {friend}. "It is in the {self.one_of(PLACES)}," said {name}.',
            lambda: f'"I like your {self.one_of(THINGS)}," said {friend}. "Thank you," said {name}.',
            lambda: f'"Are you hungry?" asked {name}. "Yes, I want some {self.one_of(FOODS)}," said {friend}.',
        ])()

    def ending(self, name, they, friend):
        return self.one_of([
            lambda: f"Then {name} and {friend} ate {self.one_of(FOODS)} and went home.",
            lambda: f"At last {they} was tired and fell asleep.",
            lambda: f"{name} and {friend} laughed and were happy.",
        ])()

    def story(self):
        name, they, their = self.one_of(PEOPLE)
        friend = self.one_of([other for other, _, _ in PEOPLE if other != name])
        middle = [self.finding(they, their), self.meeting(they, their, friend), self.talking(name, friend)]
        if self.random.random() < 0.5:
            middle.reverse()
        return " ".join([self.opening(name), *middle, self.ending(name, they, friend)])


def stories(num_bytes=NUM_BYTES, seed=SEED):
    teller, text = Storyteller(seed), ""
    while len(text) < num_bytes:
        text += teller.story() + "\n\n"
    return text


if __name__ == "__main__":
    sys.stdout.write(stories())
