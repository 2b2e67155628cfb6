# SPDX-License-Identifier: Apache-2.0
"""Adjectives and nouns for needle keys such as "brave-anchor"."""
# ruff: noqa: SIM905

ADJECTIVES: tuple[str, ...] = tuple(
    """
    able bold brave brief bright broad calm clean clear clever cold cool crisp curly dark deep
    dry eager early easy empty even faint fair fancy fast final fine firm first flat fresh full
    funny gentle giant glad golden good grand great green happy hard heavy high honest hot huge
    idle jolly keen kind large late lazy light little lively long loose loud lucky merry mild
    modern narrow neat new nice noble old open pale plain polite proud pure quick quiet rapid
    rare ready rich ripe rough round royal safe sharp shiny short shy silent silver simple slow
    small smart smooth soft solid
    """.split()
)

NOUNS: tuple[str, ...] = tuple(
    """
    anchor apple arrow badge baker banjo barn basin basket beach beard bell bench berry bird
    blade blanket board boat bone book boot bottle bow bowl box branch brass bread brick bridge
    broom brush bucket button cabin cable camel camp candle canoe card carpet castle cat cave
    chain chair chalk cheese cherry chest circle clock cloud coach coal coast coin collar comet
    copper corn cotton cousin crab cradle crane crown cup curtain dancer deer desk diamond dish
    doctor dog door dove dragon dress drum duck eagle ear engine fan farm feather fence fiddle
    field finger fish flag flame flower flute forest fork fox frame frog fruit garden gate ghost
    glass glove goat goose grape guitar hammer harbor harp hat hawk helmet hen hill honey hook
    horn horse house island jacket jar jewel judge kettle key king kite knife knot ladder lake
    lamp leaf lemon letter lion lock magnet maple marble market mask meadow medal melon mirror
    monkey moon mountain mouse needle nest nurse oak ocean onion orange orchard oven owl paddle
    painter palace panda paper parrot peach pearl pencil pepper piano pilot pine pipe planet
    plate plum pocket pond poet potato prince puzzle queen rabbit radio
    """.split()
)
