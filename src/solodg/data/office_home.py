"""Office-Home (Venkateswara et al., 2017): 15,500 images of 65 classes in four domains.

The folder of the fourth domain is spelt "Real World" or "Real_World"; both are read.
"""

from solodg.data.folder import published

OFFICE_HOME = published(
    "office-home",
    "Office-Home",
    ("office_home", "OfficeHome", "office-home", "OfficeHomeDataset_10072016"),
    ("Art", "Clipart", "Product", "Real World"),
    "Get it from https://www.hemanthdv.org/officeHomeDataset.html.",
)
