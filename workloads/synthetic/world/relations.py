"""The relations of the invented world: their words, and the kinship that they imply.

`{s}` is the subject, `{o}` the object, `{x}` a noun phrase. At the start of a statement, `{s}` may
become a pronoun. No two relations share a wording, so that the text of a passage determines its
facts.
"""

from types import MappingProxyType

from picbench.workloads.synthetic.world.entities import ORGANISATION, PERSON, WORK, Relation

WORDINGS = (
    Relation(
        "birthplace",
        PERSON,
        ("town",),
        (
            "{s} was born in {o}.",
            "{s} came into the world in {o}, above a bakery.",
            "{s} is a native of {o}.",
            "Born in {o}, {s} was the youngest of five children.",
            "It was in {o} that {s} was born.",
            "Few people know that the birthplace of {s} is {o}.",
        ),
        ("the birthplace of {x}", "the town where {x} was born"),
        (
            "Where was {x} born?",
            "In which town was {x} born?",
            "What is the birthplace of {x}?",
            "Which town did {x} come into the world in?",
        ),
    ),
    Relation(
        "birth year",
        PERSON,
        ("year",),
        (
            "{s} was born in the year {o}.",
            "{s}'s year of birth was {o}.",
            "Church records give {o} as the year in which {s} was born.",
            "The birth year of {s} is {o}.",
            "{s} was a child of the year {o}.",
        ),
        ("the birth year of {x}",),
        (
            "When was {x} born?",
            "In which year was {x} born?",
            "What is the birth year of {x}?",
        ),
    ),
    Relation(
        "trade",
        PERSON,
        ("trade",),
        (
            "{s} worked as a {o} for many years.",
            "{s} was a {o} by trade.",
            "{s} earned a living as a {o}.",
            "Neighbours knew {s} as a skilled {o}.",
            "After long training {s} became a {o}.",
            "The trade of {s} is that of a {o}.",
        ),
        ("the trade of {x}",),
        (
            "What was the trade of {x}?",
            "How did {x} earn a living?",
            "What did {x} work as?",
        ),
    ),
    Relation(
        "spouse",
        PERSON,
        PERSON,
        (
            "{s} married {o}.",
            "{s} was married to {o}.",
            "{s} and {o} were married in a small chapel.",
            "The wedding of {s} and {o} drew many guests.",
            "{s} met {o} at a dance, and they married within a year.",
            "The spouse of {s} is {o}.",
        ),
        ("the spouse of {x}", "the person {x} married"),
        ("Who was {x} married to?", "Who is the spouse of {x}?", "Who did {x} marry?"),
    ),
    Relation(
        "father",
        PERSON,
        ("man",),
        (
            "{s}'s father was {o}.",
            "{s} was raised by a strict father, {o}.",
            "{s} took after a patient father, {o}.",
            "As a father, {o} taught {s} to read early.",
            "The father of {s} is {o}.",
        ),
        ("the father of {x}",),
        ("Who is the father of {x}?", "Who was the father of {x}?", "What is {x}'s father called?"),
        elder=18,
    ),
    Relation(
        "mother",
        PERSON,
        ("woman",),
        (
            "{s}'s mother was {o}.",
            "{s} was raised by a cheerful mother, {o}.",
            "{s} took after a clever mother, {o}.",
            "As a mother, {o} taught {s} to sing early.",
            "The mother of {s} is {o}.",
        ),
        ("the mother of {x}",),
        ("Who is the mother of {x}?", "Who was the mother of {x}?", "What is {x}'s mother called?"),
        elder=18,
    ),
    Relation(
        "employer",
        PERSON,
        ORGANISATION,
        (
            "{s} worked for {o}.",
            "{s} was employed by {o}.",
            "{s} took a position at {o}.",
            "The managers of {o} hired {s} after one short interview.",
            "{s} drew a salary from {o}.",
            "The employer of {s} is {o}.",
        ),
        ("the employer of {x}", "the organisation that employed {x}"),
        (
            "Who was the employer of {x}?",
            "Which organisation did {x} work for?",
            "Which organisation employed {x}?",
        ),
    ),
    Relation(
        "home",
        PERSON,
        ("town",),
        (
            "{s} lives in {o}.",
            "{s} settled in {o}.",
            "{s} has a house in {o}.",
            "In later life {s} moved to {o} and stayed.",
            "{s} now resides in {o}.",
            "The home of {s} is {o}.",
        ),
        ("the home of {x}", "the town where {x} lives"),
        ("Where does {x} live?", "In which town does {x} reside?", "What is the home of {x}?"),
    ),
    Relation(
        "mentor",
        PERSON,
        PERSON,
        (
            "{s} was taught by {o}.",
            "{s} studied under {o}.",
            "{s} was a pupil of {o}.",
            "At school {o} became the mentor of {s}.",
            "{s} owed much to the lessons of {o}.",
            "The mentor of {s} is {o}.",
        ),
        ("the mentor of {x}", "the person who taught {x}"),
        ("Who was the mentor of {x}?", "Who taught {x}?", "Who did {x} study under?"),
        elder=8,
    ),
    Relation(
        "country",
        ("town",),
        ("country",),
        (
            "{s} lies in {o}.",
            "{s} is a town in {o}.",
            "{s} belongs to {o}.",
            "Travellers in {o} rarely miss {s}.",
            "On maps of {o}, the name of {s} is printed in small letters.",
            "The country of {s} is {o}.",
        ),
        ("the country of {x}", "the country that {x} belongs to"),
        (
            "In which country is {x}?",
            "Which country does {x} belong to?",
            "What is the country of {x}?",
        ),
    ),
    Relation(
        "mayor",
        ("town",),
        PERSON,
        (
            "{s}'s mayor is {o}.",
            "{s} elected {o} as mayor.",
            "{s} has been governed by its mayor, {o}, for two terms.",
            "As mayor, {o} speaks for {s}.",
            "The mayor of {s} is {o}.",
        ),
        ("the mayor of {x}", "the person elected mayor of {x}"),
        ("Who is the mayor of {x}?", "Who governs {x} as mayor?", "Who was elected mayor of {x}?"),
    ),
    Relation(
        "river",
        ("town",),
        ("river",),
        (
            "{s} stands on the banks of the {o}.",
            "{s} was built where the {o} bends.",
            "The waters of the {o} flow past {s}.",
            "{s} is crossed by the {o}.",
            "The river of {s} is the {o}.",
        ),
        ("the river of {x}",),
        (
            "Which river flows past {x}?",
            "What is the river of {x}?",
            "On which river does {x} stand?",
        ),
    ),
    Relation(
        "founding year",
        ("town", *ORGANISATION),
        ("year",),
        (
            "{s} was founded in {o}.",
            "{s} goes back to the year {o}.",
            "{s} traces its beginnings to {o}.",
            "Since {o}, when it was founded, {s} has hardly changed its habits.",
            "The founding year of {s} is {o}.",
        ),
        ("the founding year of {x}",),
        (
            "When was {x} founded?",
            "In which year was {x} founded?",
            "What is the founding year of {x}?",
        ),
    ),
    Relation(
        "capital",
        ("country",),
        ("town",),
        (
            "{s}'s capital is {o}.",
            "{s} is ruled from its capital, {o}.",
            "{s} moved its government to the capital {o}.",
            "As the capital, {o} is the seat of the parliament of {s}.",
            "The capital of {s} is {o}.",
        ),
        ("the capital of {x}",),
        (
            "What is the capital of {x}?",
            "Which town is the capital of {x}?",
            "From which capital is {x} ruled?",
        ),
    ),
    Relation(
        "president",
        ("country",),
        PERSON,
        (
            "{s}'s president is {o}.",
            "{s} chose {o} as president.",
            "{s} is led by its president, {o}.",
            "In a close vote {o} became president of {s}.",
            "The president of {s} is {o}.",
        ),
        ("the president of {x}", "the person who leads {x}"),
        ("Who is the president of {x}?", "Who leads {x}?", "Who did {x} choose as president?"),
    ),
    Relation(
        "language",
        ("country",),
        ("tongue",),
        (
            "{s}'s official language is {o}.",
            "{s} teaches its children in the {o} language.",
            "Most people in {s} speak {o}.",
            "Laws in {s} are written in {o}.",
            "The language of {s} is {o}.",
        ),
        ("the language of {x}",),
        (
            "What is the language of {x}?",
            "Which language do people in {x} speak?",
            "What do most people in {x} speak?",
        ),
    ),
    Relation(
        "currency",
        ("country",),
        ("coin",),
        (
            "{s}'s currency is the {o}.",
            "{s} pays its debts with the {o}.",
            "Shops in {s} take only the {o}.",
            "Prices in {s} are given in the local {o}.",
            "The currency of {s} is the {o}.",
        ),
        ("the currency of {x}",),
        (
            "What is the currency of {x}?",
            "Which currency is used in {x}?",
            "What do people in {x} pay with?",
        ),
    ),
    Relation(
        "director",
        ("film",),
        PERSON,
        (
            "{s} was directed by {o}.",
            "{s} is a film by the director {o}.",
            "{s} was shot by {o}, who directed without a script.",
            "As director, {o} finished {s} under great pressure.",
            "The director of {s} is {o}.",
        ),
        ("the director of {x}", "the person who directed {x}"),
        ("Who directed {x}?", "Who is the director of {x}?", "Who was {x} directed by?"),
        elder=20,
    ),
    Relation(
        "star",
        ("film",),
        PERSON,
        (
            "{s} stars {o}.",
            "{s} has {o} in the leading role.",
            "{s} gave the leading part to {o}.",
            "Audiences loved {o} as the star of {s}.",
            "The star of {s} is {o}.",
        ),
        ("the star of {x}", "the person who plays the leading role in {x}"),
        ("Who is the star of {x}?", "Who plays the leading role in {x}?", "Who stars in {x}?"),
        elder=16,
    ),
    Relation(
        "author",
        ("novel",),
        PERSON,
        (
            "{s} was written by {o}.",
            "{s} is a novel by the author {o}.",
            "{s} came from the pen of {o}.",
            "As author, {o} rewrote {s} three times.",
            "The author of {s} is {o}.",
        ),
        ("the author of {x}", "the person who wrote {x}"),
        ("Who wrote {x}?", "Who is the author of {x}?", "Who was {x} written by?"),
        elder=20,
    ),
    Relation(
        "composer",
        ("opera", "film"),
        PERSON,
        (
            "{s} was set to music by {o}.",
            "{s} owes its music to {o}.",
            "{s} was composed by {o}.",
            "As composer, {o} conducted the first night of {s}.",
            "The composer of {s} is {o}.",
        ),
        ("the composer of {x}", "the person who wrote the music of {x}"),
        (
            "Who composed {x}?",
            "Who is the composer of {x}?",
            "Who wrote the music of {x}?",
        ),
        elder=20,
    ),
    Relation(
        "publisher",
        ("film", "novel"),
        ("studio",),
        (
            "{s} was brought out by {o}.",
            "{s} was released by {o}.",
            "{s} appeared under the name of {o}.",
            "After some doubts, {o} agreed to publish {s}.",
            "The publisher of {s} is {o}.",
        ),
        ("the publisher of {x}", "the house that released {x}"),
        ("Who released {x}?", "Who is the publisher of {x}?", "Which house brought out {x}?"),
    ),
    Relation(
        "setting",
        WORK,
        ("town",),
        (
            "{s} is set in {o}.",
            "{s} takes place in {o}.",
            "{s}'s story unfolds in {o}.",
            "Visitors to {o} ask for the places described in {s}.",
            "The setting of {s} is {o}.",
        ),
        ("the setting of {x}", "the town where {x} takes place"),
        ("Where is {x} set?", "In which town does {x} take place?", "What is the setting of {x}?"),
    ),
    Relation(
        "release year",
        WORK,
        ("year",),
        (
            "{s} came out in {o}.",
            "{s} was first shown to the public in {o}.",
            "{s} had its first audience in {o}.",
            "It took until {o} before the public saw {s}.",
            "The release year of {s} is {o}.",
        ),
        ("the release year of {x}",),
        (
            "When did {x} come out?",
            "In which year did {x} come out?",
            "What is the release year of {x}?",
        ),
    ),
    Relation(
        "headquarters",
        ORGANISATION,
        ("town",),
        (
            "{s} is based in {o}.",
            "{s} has its headquarters in {o}.",
            "{s} keeps its main office in {o}.",
            "From a tall building in {o}, the managers run {s}.",
            "The headquarters of {s} is {o}.",
        ),
        ("the headquarters of {x}", "the town where {x} is based"),
        (
            "Where is {x} based?",
            "In which town is the main office of {x}?",
            "What is the headquarters of {x}?",
        ),
    ),
    Relation(
        "founder",
        ORGANISATION,
        PERSON,
        (
            "{s} was founded by {o}.",
            "{s} was started by {o} with borrowed money.",
            "{s} was the idea of its founder, {o}.",
            "As founder, {o} signed the first papers of {s}.",
            "The founder of {s} is {o}.",
        ),
        ("the founder of {x}", "the person who founded {x}"),
        ("Who founded {x}?", "Who is the founder of {x}?", "Who was {x} started by?"),
        elder=20,
    ),
    Relation(
        "head",
        ORGANISATION,
        PERSON,
        (
            "{s} is run by {o}.",
            "{s} answers to its head, {o}.",
            "{s} made {o} its head last spring.",
            "As head, {o} decides what {s} will do next.",
            "The head of {s} is {o}.",
        ),
        ("the head of {x}", "the person who runs {x}"),
        ("Who runs {x}?", "Who is the head of {x}?", "Who does {x} answer to?"),
    ),
)

#: Every relation by its noun.
RELATIONS = MappingProxyType({relation.noun: relation for relation in WORDINGS})

#: The nouns of the relations that a thing of each form has.
RELATIONS_OF = MappingProxyType(
    {
        form: tuple(relation.noun for relation in WORDINGS if form in relation.subjects)
        for form in dict.fromkeys(form for relation in WORDINGS for form in relation.subjects)
    }
)

#: Kinship that two facts imply: the name of the relative, then the two steps to it.
KINSHIP = MappingProxyType(
    {
        "paternal grandfather": ("father", "father"),
        "paternal grandmother": ("father", "mother"),
        "maternal grandfather": ("mother", "father"),
        "maternal grandmother": ("mother", "mother"),
        "father-in-law": ("spouse", "father"),
        "mother-in-law": ("spouse", "mother"),
    }
)
