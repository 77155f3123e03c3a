"""`python -m appliance`"""

from appliance.main import main

main()
