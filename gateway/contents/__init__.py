# Contents of calls, for the teams that want them kept: what was asked and answered, sealed, for so many days.
