# SPDX-License-Identifier: Apache-2.0
"""Fields of a person's profile, and their values: words that RULER's noise does not hold."""

from __future__ import annotations

_WORDS = {
    "best friend": "Alice Tom Mary Peter James Emma David Laura Paul Sarah Mark Helen",
    "last name": "Smith Brown Taylor Wilson Clark Baker Carter Cooper Turner Parker Bailey Murphy",
    "home town": "Paris London Rome Berlin Madrid Vienna Boston Chicago Tokyo Dublin Athens Moscow",
    "country of birth": "Spain Italy Japan Brazil Egypt India Canada Mexico Norway Poland Greece",
    "car brand": "Ford Toyota Honda Fiat Volvo Tesla Mazda Nissan Porsche Audi Chevrolet Jaguar",
    "password": "anchor basket blanket bridge candle castle diamond engine garden hammer island",
    "day off": "Monday Tuesday Wednesday Thursday Friday Saturday Sunday",
    "favorite month": "January February March April June July August October November December",
    "favorite color": "purple orange black white brown pink silver golden violet",
    "favorite flower": "rose tulip lily daisy sunflower orchid iris lavender",
    "favorite drink": "tea coffee milk water juice wine beer cocoa",
    "breakfast": "pizza soup rice bread cheese fish pasta cake salad pancakes",
    "pet": "dog cat horse rabbit parrot goat monkey duck snake turtle tiger",
    "musical instrument": "piano guitar violin drum flute harp trumpet banjo cello",
    "shoe size": "36 37 38 39 40 41 42 43 44 45 46",
}
FIELDS: dict[str, tuple[str, ...]] = {
    field: tuple(values.split()) for field, values in _WORDS.items()
}
