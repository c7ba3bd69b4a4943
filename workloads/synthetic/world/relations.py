"""The relations of the invented world, by noun and by form, and the kinship that they imply."""

from types import MappingProxyType

from picbench.workloads.synthetic.world.wordings import WORDINGS

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
