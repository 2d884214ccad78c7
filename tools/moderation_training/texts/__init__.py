# Texts written for this project, to fit and judge the classifiers.
