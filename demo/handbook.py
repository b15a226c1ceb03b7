"""The text of the demo: a handbook of about 3,000 tokens that all prompts share.

The policies are about different things in different words, because a model of 135 million
parameters confuses similar ones. The inventory before them is only there for its length.
"""

from __future__ import annotations

TITLE = "Handbook of the Northwind Lantern Company"
INVENTORY_ITEMS = 46

_MATERIALS = ("copper", "silver", "brass", "glass", "pewter", "iron", "tin")
_PLACES = ("attic", "cellar", "hall", "stable", "loft")

# One policy a line; they are numbered when the handbook is put together.
_POLICIES = """\
The workshop opens at seven in the morning, and the last one to leave in the evening locks the \
green door and hangs the key on the hook behind the clock.
Hot chocolate is sold in the old clock room from ten to eleven. Cups stay in the clock room, \
because the cat in the stockroom drinks from everything it finds.
Every lantern is lit once before it is packed. The tester signs the small card with a pencil, \
since ink fades in the light of the lantern.
Visitors are met at the harbour gate by the porter, get a blue badge, and must not enter the \
furnace hall without wooden shoes.
Salaries are paid on the twentieth of each month. When the twentieth is a Sunday, they are paid \
on the Friday before.
A broken window is reported to the caretaker, Mister Halvorsen, who lives above the stable and \
answers only when the brass bell is rung twice.
Glass from Bohemia is stored upright in straw. Glass from Murano is stored flat between sheets of \
felt, on the third shelf from the floor.
Holidays are asked for in writing, six weeks ahead, on yellow paper. Between the first snow and \
New Year nobody takes more than three days.
The founder of the company, Ingrid Solberg, built her first lantern in a fishing boat. It hangs \
in the entrance hall and is dusted on her birthday.
Parcels for the islands leave with the mail boat on Tuesday. Parcels for the mountains go by \
train on Thursday, and heavy ones are tied with two ropes.
Whoever finds a mistake in this handbook writes it into the red notebook in the library and gets \
a jar of honey from the beekeeper.
Oil is kept in the stone cellar in barrels of forty litres. A candle must never be carried down \
there; use the mirror at the top of the stairs.
New apprentices spend the first month in the sorting room, where they learn to tell tin from \
pewter with their eyes closed.
The choir practises in the paint shop on Wednesday evening. Wet lamps are moved to the drying \
loft before the singing starts.
A customer who returns a lantern within a year gets a new one, unless it has been used under \
water. Lanterns for divers have their own certificate.
The company dog is called Bosun. He may sleep in the office, but he is not to be fed with cheese.
In case of fire everybody meets at the sundial. The youngest apprentice carries the order books, \
and the bookkeeper counts heads.
Brass is polished with lemon and salt. Silver is polished with chalk, and copper is left as it is, \
since our buyers like it brown.
Drawings of new models are locked in the iron cabinet. Only the chief designer, Madame Okonkwo, \
has the combination, and she changes it at midsummer.
Bicycles are parked under the chestnut tree. The company lends a pump and a repair kit to anybody \
who leaves a shoe as a deposit.
The winter model has double walls and burns for nineteen hours. The summer model burns for eight \
hours and weighs as much as two apples.
Lunch is served at noon in the long room. On Monday there is soup, on Friday there is fish, and \
on the day of the spring market there is cake.
Ladders are checked every spring by the carpenter, who paints a white ring around those that are \
safe and saws the others into firewood.
Complaints are answered within five days. Letters that begin with a poem are answered with a poem, \
and the copy goes to the archive.
Nobody blows glass alone. If a helper is ill, the furnace is kept warm and the hour is spent on \
sharpening tools.
The night watchman walks along the river wall every two hours and writes the height of the water \
on the slate next to the pump.
Travel by sleeping car is paid for trips longer than twelve hours. Breakfast on the train is paid \
as well, but newspapers are not.
Wicks are woven in the village of Tarn from cotton and one thread of wool. A good wick is as long \
as a hand and smells of nothing.
The library lends three books at a time. Books about volcanoes stay in the reading room, because \
the last one came back scorched.
Each department chooses a speaker in October. Speakers meet the director on the bridge, and talk \
until both have said what they came to say.
Handles are bent from ash wood over steam. They rest for nine days in the frame before they are \
oiled, and for one day after.
The photographs for the catalogue are taken in September, when the light in the courtyard is soft. \
Ladders, cats and cousins are kept out of the picture.
Gloves made of goat leather are handed out every spring. Lost gloves are kept in the drawer under \
the globe and given to the theatre after a year.
The telephone in the hallway is for orders. Private calls are made from the booth near the stairs, \
and the coins go to the lifeboat fund.
Red lanterns are made for railways only. They carry a number on the base, and each number is \
written into the big ledger before it leaves the house.
When clouds hide the harbour light, two of our largest lanterns are carried to the pier. The \
harbour master pays with smoked eel.
The doctor comes on the first Monday of the month and sits in the map room. Splinters are removed \
at any time by the seamstress.
Prices are set in January. A price that was written on an offer is kept until the ice is gone, \
even if tin becomes dearer.
Rain water from the roof is collected in the copper tank. It is used for washing glass, since it \
leaves no spots.
Paint is mixed by weight. The recipe for harbour green is one part yellow to two parts blue, and a \
spoon of soot.
Children may visit on Saturday morning. They can make a paper lantern at the round table and take \
it home in a bag.
A signal lantern has three shutters. It is tested from the church tower, and the test has passed \
when the ferryman waves his hat.
The bookkeeper, Professor Aune, keeps the accounts in violet ink. Corrections are made in black \
and explained in the margin.
Snow is cleared from the yard by those who live nearest. They start at six and get pancakes in \
the kitchen.
Samples for shops are packed in walnut boxes. A box that is not sent back after a month is \
charged with four crowns.
Hinges are bought from the smith in Elverum, who delivers on foot. He is offered coffee, and never \
asked about his brother.
The steam engine rests on Sunday. The stoker oils it on Saturday evening and covers it with the \
old sail.
Retired workers keep their mug, their hook in the wardrobe, and the right to be asked for advice \
about difficult solder.
A lantern that is given as a present has a ribbon. The ribbon is white for weddings, blue for a \
birth, and orange for a new ship.
The meteorite in the garden may be touched. It fell in the year of the great storm and is used as \
a weight by the bookbinder.
"""


def handbook() -> str:
    """The handbook; always the same text."""
    inventory = (inventory_line(number) for number in range(1, INVENTORY_ITEMS + 1))
    policies = (
        f"Policy {number}. {text}" for number, text in enumerate(_POLICIES.splitlines(), start=1)
    )
    return "\n".join([TITLE, "", "Inventory", *inventory, "", "Policies", *policies, ""])


def inventory_line(number: int) -> str:
    """One numbered line of the inventory."""
    material = _MATERIALS[number % len(_MATERIALS)]
    place = _PLACES[number % len(_PLACES)]
    return f"Lantern {number}: {material}, kept in the {place}, shelf {1 + 7 * number % 19}, " + (
        f"sold for {20 + 13 * number % 71} crowns."
    )


def prompt(question: str) -> str:
    """A question about the handbook, in the chat form of the demo model (ChatML)."""
    return (
        "<|im_start|>system\nAnswer questions about this handbook in one short sentence.\n\n"
        f"{handbook()}<|im_end|>\n"
        f"<|im_start|>user\n{question}<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def warm_up_prompt() -> str:
    """A text of some 500 tokens that does not begin as the handbook does."""
    return "\n".join(inventory_line(number) for number in range(200, 220))
