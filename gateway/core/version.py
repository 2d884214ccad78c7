# The version of this program: of the API's description, and of the processes that the database lists.

VERSION = "1.0.0"
