# Usage and cost reports for teams, finance and admins, and the corrections they book.
